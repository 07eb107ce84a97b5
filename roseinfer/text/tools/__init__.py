"""Tool calls as models write them: one parser and one grammar per format, found from the chat template."""
