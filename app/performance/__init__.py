"""What a step costs: measured in turn, with intervals, and taken apart."""
