"""Reports of a run or the gate for CI systems: JUnit XML, GitHub, GitLab and SARIF."""
