"""What others have sent, made fit to be shown in a log line or an error's message."""


def printable(text: str, most: int) -> str:
    """At most `most` characters of a text, with an escape in place of every character that would not be seen:
    control characters, line breaks of all kinds, what turns the direction of writing, halves of
    surrogates."""
    if len(text) > most:
        return printable(text[:most], most) + "..."
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
