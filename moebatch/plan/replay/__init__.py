"""A job pass by pass, whole or in a few kinds of passes."""
