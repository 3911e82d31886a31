"""What of the copy engine was asked for."""


def check_mooncake_custom_mem_pool_enabled():
    return False, None
