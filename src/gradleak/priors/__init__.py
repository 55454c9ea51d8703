"""Training generators: recipes, the two networks against each other, scores, resumable training."""
