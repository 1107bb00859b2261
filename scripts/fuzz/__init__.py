"""Bad input, thousands of times: see `__main__`. Every kind of input is an endless stream of attempts."""
