class Platform:
    ray_device_key = "GPU"


current_platform = Platform()
