"""Studies: claims about the theory as experiments that can fail. See `base` for what a study is."""
