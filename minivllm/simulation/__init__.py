"""The real engine on a virtual clock: what would it do, and how fast?"""
