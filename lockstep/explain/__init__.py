"""Fits recorded arrays by sums of others, and says what their coefficients mean."""
