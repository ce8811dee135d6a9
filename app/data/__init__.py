"""Where images come from; nothing here knows of devices or strategies."""
