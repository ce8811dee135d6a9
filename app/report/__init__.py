"""Plots and `report.html`, from records on disk alone."""

import os

os.environ["MPLBACKEND"] = "agg"  # Figures go into files, whatever the user's own setting.
