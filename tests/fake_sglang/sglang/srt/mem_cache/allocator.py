"""The allocators: of slots, and of pages."""

import torch


class Slots:
    def __init__(self, size, device):
        self.free_slots = torch.arange(1, size + 1, device=device)

    def available_size(self):
        return len(self.free_slots)

    def alloc(self, need_size):
        taken, self.free_slots = self.free_slots[:need_size], self.free_slots[need_size:]
        return taken

    def free(self, indices):
        self.free_slots = torch.cat([self.free_slots, indices])


class TokenToKVPoolAllocator(Slots):
    pass


class PagedTokenToKVPoolAllocator:
    def __init__(self, size, page_size, dtype, device, kvcache, need_sort):
        self.page_size = page_size
        self.kvcache = kvcache
        self.free_pages = list(range(1, size // page_size + 1))

    def available_size(self):
        return len(self.free_pages) * self.page_size

    def alloc(self, need_size):
        count = need_size // self.page_size
        if count > len(self.free_pages):
            return None
        pages, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return (torch.tensor(pages)[:, None] * self.page_size + torch.arange(self.page_size)).view(-1)

    def free(self, indices):
        self.free_pages = torch.unique(indices // self.page_size).tolist() + self.free_pages

    def get_cpu_copy(self, indices, mamba_indices=None):
        return self.kvcache.get_cpu_copy(indices, mamba_indices=mamba_indices)

    def load_cpu_copy(self, copy, indices, mamba_indices=None):
        return self.kvcache.load_cpu_copy(copy, indices, mamba_indices=mamba_indices)
