import time


class Slow:
    def __init__(self):
        time.sleep(30)
