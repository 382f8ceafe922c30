"""Timelines of a step: predicted, recorded or loaded; measured, drawn and compared by the same code."""
