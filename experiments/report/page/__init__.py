"""The report page: all that results/ says in one file, results/report/index.html, which opens without a network."""
