"""Reports: readable pages from what runs have recorded."""
