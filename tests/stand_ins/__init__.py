"""Programs that stand in for the command where a test needs it to fail."""
