"""What uses the six files at the top."""
