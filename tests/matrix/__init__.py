"""The matrix: every exception shape through every boundary, the code read back and how far it is believed."""
