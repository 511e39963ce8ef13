from absent import stand_in

__version__ = "0.0.0"
stand_in(__name__)
