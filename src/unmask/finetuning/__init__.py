"""Fine-tuning: a denoiser with a task head, trained on labelled texts, measured over seeds, used as a classifier."""
