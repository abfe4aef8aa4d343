"""The nouns by which the report names a run's samples: images, texts, or rows of a table."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """The words for one kind of sample, which every sentence about samples uses.

    Attributes:
        one: the noun for a single sample.
        many: the noun for several samples.
        parts: the noun for the entries of a sample, such as pixels, to which PSNR refers.
        likeness: the name of the quantity by which an original is found among other samples.
    """

    one: str
    many: str
    parts: str
    likeness: str

    @property
    def a(self) -> str:
        """Return the noun for a single sample, with its article.

        Example:
            >>> IMAGE.a, TEXT.a
            ('an image', 'a text')
        """
        return f"an {self.one}" if self.one[0] in "aeiou" else f"a {self.one}"


_CORRELATION = "what all {} have in common (the blind guess) is subtracted"
IMAGE = Sample(
    "image", "images", "pixels", f"correlation of pixels, once {_CORRELATION.format('images')}"
)
ROW = Sample("row", "rows", "numbers", f"correlation of rows, once {_CORRELATION.format('rows')}")
TEXT = Sample("text", "texts", "tokens", "the share of words in common, in any order (ROUGE-1)")
SAMPLES = {sample.one: sample for sample in (IMAGE, ROW, TEXT)}
