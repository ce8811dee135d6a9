"""The accuracy plot and `report.html`, from records on disk alone."""

import os

os.environ["MPLBACKEND"] = "agg"  # Figures are written to files, whatever the user's setting.
