"""Images: read, checked, and made into what each family of models was trained with."""
