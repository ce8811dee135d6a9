"""Plots and `report.html`, from records on disk alone."""
