"""Records trainings of other frameworks: what a step computes, in files of plain arrays."""
