class Platform:
    def ray_resource_name(self):
        return "GPU"


def get_platform():
    return Platform()
