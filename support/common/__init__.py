"""What every command needs: errors, files, options, devices, figures."""
