"""Files to copy beside a user's script, to record and compare its training steps."""
