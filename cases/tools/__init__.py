"""Tools that watch the programs, one file each, and say which of them are wrong."""
