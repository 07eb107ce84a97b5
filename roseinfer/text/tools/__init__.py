"""Tool calls as models write them: one parser and one grammar per format, selected by the chat template."""
