"""Data: text → tokens → packed rows → batches."""
