"""The pages that people open in a browser: static, each in one piece, with nothing from anywhere else."""

from maxsimd.api.pages.page import Page, playground, reference

__all__ = ["Page", "playground", "reference"]
