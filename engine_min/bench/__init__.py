"""`pagedkern-engine bench`."""
