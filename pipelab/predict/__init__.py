"""Predictions of a schedule: costs in, a timeline, its memory and the papers' formulas out."""
