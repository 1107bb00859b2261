"""Where data comes from: files of the user, verified downloads, or the embedded default inside a pip package."""
