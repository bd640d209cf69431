"""Names and shapes of other libraries on the posteriors here."""
