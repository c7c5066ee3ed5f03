"""Reports: what runs have written down, as a page for people."""
