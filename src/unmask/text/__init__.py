"""Text in and out: prompts with gaps, infilling and editing, bulk generation."""
