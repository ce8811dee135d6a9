"""Whether two trainings are the same."""
