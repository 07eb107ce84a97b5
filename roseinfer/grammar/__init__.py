"""Grammars that outputs follow: from what a request asks for to what may be said next."""
