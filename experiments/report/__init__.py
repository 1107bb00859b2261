"""What came out: tables, figures and statistics, read from results/ alone."""
