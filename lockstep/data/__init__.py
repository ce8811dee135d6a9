"""What a recording is: its arrays, its description, its file; parts and names put together."""
