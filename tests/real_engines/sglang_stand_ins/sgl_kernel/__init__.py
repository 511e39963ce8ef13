from absent import stand_in

__version__ = "0.4.10"  # what SGLang 0.5.23 asks for at least
stand_in(__name__)
