"""What the paper compares FlowNar with (Tables 1 to 5)."""
