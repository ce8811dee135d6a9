"""What a step computes, one node of it in each file."""
