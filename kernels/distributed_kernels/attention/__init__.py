"""Dilated and block-sparse attention, on one device or a sequence split over ranks."""
