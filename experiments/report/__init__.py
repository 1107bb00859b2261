"""Tables, figures and statistics, read from results/ alone."""
