"""What everything else stands on: arithmetic on trees of tensors, keyed draws, names, files."""
