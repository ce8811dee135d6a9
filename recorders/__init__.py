"""Files that are copied beside a script of one's own, to record what it trains."""
