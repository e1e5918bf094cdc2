"""What you type: options, inputs, what is printed."""
