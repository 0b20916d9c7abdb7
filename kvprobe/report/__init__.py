"""What a report says as data, and how it becomes a page: document, figures, interactive views, templates."""
