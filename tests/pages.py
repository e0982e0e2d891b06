"""What an HTML page holds."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """The elements of a page and the texts in them; its tags must match."""

    VOID = frozenset({"meta", "link", "br", "img", "hr", "input", "source", "col", "wbr", "embed"})

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append((tuple(self.open), data))

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self, tag):
        """The texts directly in such elements, each in one line."""
        return [" ".join(text.split()) for within, text in self.texts if within[-1:] == (tag,)]

    def read(self, within):
        """What is to be read in an element and those in it, in one line."""
        return " ".join(" ".join(data for tags, data in self.texts if within in tags).split())
