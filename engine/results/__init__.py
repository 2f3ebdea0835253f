"""From values to what a caller gets: scores, rankings, embeddings, and scores as they are ready."""
